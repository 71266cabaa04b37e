# F on CPUs, without vLLM. From the top of the source tree: docker build -f deploy/docker/ffn-cpu.Dockerfile .
# --build-arg PIP_EXTRA_INDEX_URL=... names an index with CPU builds of torch: the default one's are much larger.
FROM python:3.12-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1
ARG PIP_EXTRA_INDEX_URL
RUN pip install torch==2.13.0
WORKDIR /src
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY native native
COPY ffn_faas ffn_faas
RUN pip install '.[cpu]'

FROM python:3.12-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/*
RUN useradd --system --uid 10001 --no-create-home --home-dir /tmp ffn
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1
USER 10001
WORKDIR /tmp
EXPOSE 8100
# torchrun does not reap what its workers leave behind; an init process does, and passes signals on.
ENTRYPOINT ["tini", "--"]
CMD ["python", "-m", "ffn_faas", "--help"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-m", "ffn_faas", "wait", "--phase=live", "--timeout=3"]
