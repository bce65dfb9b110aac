# An image for the ranks: Python and the packages of a lock file, hashes checked. It holds nothing of Paceline, because
# each run brings its own code. docs/kubernetes.md and docs/slurm.md say how it is used.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm

# g++: trainer.compile on processors and Triton's kernels; numactl: ranks bound to the cores near their GPU
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ numactl \
    && rm -rf /var/lib/apt/lists/*

ARG LOCK=requirements-nodes.lock
COPY ${LOCK} /tmp/requirements.lock
RUN pip install --no-cache-dir --no-deps --require-hashes -r /tmp/requirements.lock && rm /tmp/requirements.lock

# Pods run as another user, without a home of their own.
ENV HOME=/tmp PYTHONUNBUFFERED=1
USER 1000
