# Attention on NVIDIA GPUs: the vLLM project's own image and this package. Stock vLLM in front of the GPU backend has not
# run yet; see the README. From the top of the source tree: docker build -f deploy/docker/attention-cuda.Dockerfile .
FROM vllm/vllm-openai:v0.32.0
RUN apt-get update && apt-get install -y --no-install-recommends g++ tini && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY native native
COPY ffn_faas ffn_faas
ENV PIP_NO_CACHE_DIR=1
RUN pip install '.[gpu]'
RUN useradd --system --uid 10001 --no-create-home --home-dir /tmp ffn
ENV HOME=/tmp PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1
USER 10001
WORKDIR /tmp
EXPOSE 8000
ENTRYPOINT ["tini", "--"]
CMD ["python3", "-m", "vllm.entrypoints.openai.api_server", "--help"]
