# F on NVIDIA Hopper GPUs, without vLLM. From the top of the source tree: docker build -f deploy/docker/ffn-cuda.Dockerfile .
# The build stage has nvcc, which the GPU data plane needs; the image itself gets CUDA's libraries with torch.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1
ARG PIP_EXTRA_INDEX_URL
RUN pip install torch==2.13.0
WORKDIR /src
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY native native
COPY ffn_faas ffn_faas
RUN pip install '.[gpu]'

FROM ubuntu:24.04
RUN apt-get update && apt-get install -y --no-install-recommends python3 tini && rm -rf /var/lib/apt/lists/*
RUN useradd --system --uid 10001 --no-create-home --home-dir /tmp ffn
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility CUDA_MODULE_LOADING=EAGER
USER 10001
WORKDIR /tmp
EXPOSE 8100
# torchrun does not reap what its workers leave behind; an init process does, and passes signals on.
ENTRYPOINT ["tini", "--"]
CMD ["python", "-m", "ffn_faas", "--help"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-m", "ffn_faas", "wait", "--phase=live", "--timeout=3"]
