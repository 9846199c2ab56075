# Octavo on CPUs. Build from the repository's root:
#
#   docker build -f deploy/docker/cpu.Dockerfile -t registry.example.com/octavo:0.1.0 .
#
# TORCH_INDEX may name an index with CPU-only wheels of torch, which are a tenth of the size.
ARG PYTHON=3.12.12-slim-bookworm

FROM python:${PYTHON} AS build
ARG TORCH_INDEX=""
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN if [ -n "$TORCH_INDEX" ]; then pip install --index-url "$TORCH_INDEX" "torch>=2.11,<2.14"; fi
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY octavo ./octavo
RUN pip install ".[hub]"

FROM python:${PYTHON}
# The native kernels are compiled for the CPU that they run on, at the first start; the result is
# kept in OCTAVO_CACHE_DIR.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home --home-dir /models octavo
COPY --from=build /opt/octavo /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH HF_HOME=/models/hub OCTAVO_CACHE_DIR=/models/cache
USER 10001:10001
WORKDIR /models
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health/live')"]
ENTRYPOINT ["octavo"]
CMD ["serve"]
