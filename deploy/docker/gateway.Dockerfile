# LiteLLM's proxy with `octavo gateway` around it, for hosts without Kubernetes. Build from the
# repository's root:
#
#   docker build -f deploy/docker/gateway.Dockerfile -t registry.example.com/octavo-gateway:0.1.0 .
ARG PYTHON=3.12.12-slim-bookworm

FROM python:${PYTHON} AS build
ARG LITELLM=1.110.2
ARG TORCH_INDEX=""
RUN python -m venv /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN if [ -n "$TORCH_INDEX" ]; then pip install --index-url "$TORCH_INDEX" "torch>=2.11,<2.14"; fi
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY octavo ./octavo
RUN pip install ".[platform]" "litellm[proxy]==${LITELLM}"

FROM python:${PYTHON}
RUN useradd --uid 10001 --create-home octavo
COPY --from=build /opt/octavo /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH
USER 10001:10001
WORKDIR /home/octavo
EXPOSE 4000
STOPSIGNAL SIGTERM
ENTRYPOINT ["octavo", "gateway"]
CMD ["--spec", "/etc/octavo/cluster.toml"]
