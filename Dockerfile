# One image for every pod of realmops: training, index builder, server, submission. MLflow's server has its own image.
#   docker build --build-arg TORCH_INDEX=URL --build-arg COMMIT=$(git rev-parse HEAD) --tag realmops:TAG .
#                                                          for CPUs; URL is the index of torch's CPU builds, which
#                                                          https://pytorch.org/get-started/locally shows
#   docker build --build-arg VARIANT=gpu ...               with torch and FAISS for CUDA, without OpenVINO; needs no TORCH_INDEX
#   docker build --build-arg BASE=IMAGE ...                another base with Python 3.11 and its pip
#   docker build --secret id=pip,src=pip.conf ...          packages from the indexes of your pip.conf
#   docker build --secret id=ca,src=FILE ...               your network's certificates: cert = /run/secrets/ca in pip.conf
# On x86-64, torch of the default index is linked with CUDA's libraries and cannot be imported without them: 4 of 6 GB. The
# cpu variant refuses it before it downloads it. TORCH_INDEX is not needed where pip.conf names such an index, and on ARM.
# It stays readable in the image's history: an address with a password belongs into pip.conf.
ARG BASE=python:3.11-slim

# What realmops depends on. The layer of gigabytes is made by this file, the versions and the extras alone: builds of other
# commits have the same, and a node pulls it once. An empty realmops names the dependencies to pip, and goes again.
FROM ${BASE} AS packages
ARG VARIANT=cpu
ARG TORCH_INDEX=
WORKDIR /build
COPY pyproject.toml constraints.txt ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca \
    case "$VARIANT" in \
        cpu) search=faiss,openvino ;; \
        gpu) search=gpu ;; \
        *) echo "VARIANT is '$VARIANT', allowed are cpu and gpu" >&2; exit 2 ;; \
    esac \
    && mkdir -p src/realmops \
    && touch README.md LICENSE \
    && python -m venv --without-pip /opt/realmops \
    && set -- --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
    && if [ "$VARIANT" = cpu ]; then \
        python -m pip --python /opt/realmops/bin/python install --dry-run --quiet --report torch.json "$@" torch || exit 1; \
        if grep -q '"name": "nvidia-' torch.json; then \
            echo "VARIANT is cpu, but pip found torch for CUDA; name an index of torch's CPU builds (PyTorch's installation" \
                "page shows it) by --build-arg TORCH_INDEX=URL or in pip.conf, or set --build-arg VARIANT=gpu" >&2; \
            exit 2; \
        fi; \
    fi \
    && python -m pip --python /opt/realmops/bin/python install --no-cache-dir "$@" \
        ".[cluster,documents,$search]" \
    && python -m pip --python /opt/realmops/bin/python uninstall --yes realmops

FROM packages AS build
COPY README.md LICENSE setup.py ./
COPY k8s ./k8s
COPY pipelines ./pipelines
COPY src ./src
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca \
    python -m pip --python /opt/realmops/bin/python install --no-cache-dir --no-deps --prefix /opt/package .

FROM packages
ARG VARIANT=cpu
ARG COMMIT=
LABEL org.opencontainers.image.title="realmops" \
    org.opencontainers.image.description="REALM trained end to end (${VARIANT})" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.revision="${COMMIT}"
COPY --from=build /opt/package /opt/realmops
# A project's params.yaml and presets are mounted here, from a ConfigMap: another option is another commit and no other image.
WORKDIR /app
COPY LICENSE ./
# The user has no name of its own, and the root is read-only.
ENV PATH=/opt/realmops/bin:$PATH HOME=/tmp TMPDIR=/tmp USER=realmops PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    REALMOPS_COMMIT=${COMMIT}
USER 10001:10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["realmops"]
