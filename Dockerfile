# wedlm serve, generate and train. docs/pods.md and docs/evaluation.md say how it is used.
#
#   docker build -t wedlm .                                # for CPUs
#   docker build -t wedlm --build-arg ACCELERATOR=tpu .    # for TPUs; cuda for NVIDIA GPUs
#   docker run -p 127.0.0.1:8000:8000 wedlm

ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS build
ARG ACCELERATOR=cpu
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY wedlm_jax wedlm_jax
COPY train train
COPY infer infer
# pip only warns of an extra that there is not.
RUN case "$ACCELERATOR" in \
      cpu) extras= ;; \
      tpu | cuda) extras=",$ACCELERATOR" ;; \
      *) echo "ACCELERATOR: expected cpu, tpu or cuda, not $ACCELERATOR" >&2; exit 2 ;; \
    esac \
    && python -m venv /opt/wedlm \
    && /opt/wedlm/bin/pip install --no-cache-dir -c constraints.txt \
      ".[serve,grammar,chat,eval,data,gcs,int8,tensorboard${extras}]"

FROM python:${PYTHON}-slim-bookworm
RUN useradd --create-home --uid 1000 wedlm
COPY --from=build /opt/wedlm /opt/wedlm
WORKDIR /home/wedlm
COPY configs configs
# Inside, all addresses are the container's own; what is published is said to `docker run`.
ENV PATH=/opt/wedlm/bin:$PATH WEDLM_HOST=0.0.0.0
USER 1000
EXPOSE 8000
# Of `serve`; a job is run with --no-healthcheck. The first answer may wait for compiling.
HEALTHCHECK --interval=30s --timeout=5s --start-period=10m --retries=3 \
  CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ.get('WEDLM_PORT', '8000') + '/health', timeout=4)"]
ENTRYPOINT ["wedlm"]
CMD ["serve"]
