# Octavo on NVIDIA GPUs, with Ray for several nodes. Build from the repository's root:
#
#   docker build -f deploy/docker/cuda.Dockerfile -t registry.example.com/octavo:0.1.0-cuda .
#
# torch brings CUDA's libraries; the driver is the node's. RAY must be the `ray.version` of a spec.
ARG PYTHON=3.12.12-slim-bookworm

FROM python:${PYTHON} AS build
ARG RAY=2.60.0
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY octavo ./octavo
RUN pip install ".[gpu,ray,hub]" "ray[default,serve]==${RAY}"

FROM python:${PYTHON}
# Triton compiles the stubs that launch its kernels with a C compiler, when they are first used.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ libc6-dev wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home --home-dir /models octavo
COPY --from=build /opt/octavo /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH HF_HOME=/models/hub OCTAVO_CACHE_DIR=/models/cache \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /models
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=1200s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health/live')"]
# No ENTRYPOINT: KubeRay runs `ray start` in the same image.
CMD ["octavo", "serve"]
