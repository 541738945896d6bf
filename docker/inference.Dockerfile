# The inference node. Build from the repository root: docker build -f docker/inference.Dockerfile -t splice-inference .
# The development image has nvcc, with which vLLM's libraries compile kernels when they first need them.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends build-essential python3.12-dev python3.12-venv && \
    rm -rf /var/lib/apt/lists/*
WORKDIR /opt/splice
COPY . .
RUN requirements/make_env.sh python3.12 /opt/env requirements/inference-cuda-$(cat requirements/cuda-stack).lock 3.12 3.13
ENV PATH=/opt/env/bin:$PATH VLLM_NO_USAGE_STATS=1
ENTRYPOINT ["python", "-P", "-m", "splice"]
CMD ["--help"]
