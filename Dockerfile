# The tutorial in a container, by the same `run` as everywhere else:
#
#   docker build -t megakit .
#   docker run --rm -v "$PWD:/workspace" megakit                     (add --gpus all for a GPU)
#   docker run --rm -v "$PWD:/workspace" megakit predict --help
#   docker run --rm -v "$PWD:/workspace" -p 6006:6006 megakit tensorboard --bind_all
#
# From NVIDIA's NeMo image, set-up uses the NeMo and Megatron-Core found there if they fit, and adds
# only what is missing; from NVIDIA's PyTorch image it makes a complete .venv:
#
#   docker build -t megakit --build-arg BASE=NAME-OF-THE-IMAGE .
#
# The user of a container cannot write into .venv: what `notebook`, `new` or exports need in
# addition (requirements-dev.lock) is installed with the image:
#
#   docker build -t megakit --build-arg ADD=--dev .
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG ADD=""

# Set-up installs uv, by pip, by venv or by another uv. Debian's and Ubuntu's own images lack all.
RUN python3 -m pip --version || python3 -c "import ensurepip" || command -v uv \
    || (apt-get update && apt-get install -y --no-install-recommends python3-venv \
        && rm -rf /var/lib/apt/lists/*)

# First what set-up reads, so that a changed line of code does not install gigabytes again.
WORKDIR /opt/megakit
COPY run run_setup.sh requirements.lock requirements-dev.lock ./
# Compiled here, because nobody can write there later; without a cache, which would double the
# layer. If uv has to fetch a Python, everybody can execute it.
RUN UV_COMPILE_BYTECODE=1 UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1 UV_PYTHON_INSTALL_DIR=/opt/python \
    ./run setup ${ADD}
COPY . .

# `data` and `runs` appear where the container is started. Whoever owns a mounted folder may start
# it: docker run --user "$(id -u):$(id -g)". An unknown user has no home and no name of its own,
# and libraries ask for both.
RUN mkdir -p /workspace && chmod 1777 /workspace
ENV HOME=/tmp USER=megakit
WORKDIR /workspace
USER 1000:1000

ENTRYPOINT ["/opt/megakit/run"]
CMD ["tutorial"]
