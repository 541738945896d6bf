# The trainer, and the orchestrator. Build from the repository root: docker build -f docker/trainer.Dockerfile -t splice-trainer .
# The lock has CUDA's libraries, cuDNN and nvcc.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends build-essential python3.12-dev python3.12-venv && \
    rm -rf /var/lib/apt/lists/*
WORKDIR /opt/splice
COPY . .
RUN requirements/make_env.sh python3.12 /opt/env requirements/trainer-cuda-$(cat requirements/cuda-stack).lock 3.12 3.13
ENV PATH=/opt/env/bin:$PATH
ENTRYPOINT ["python", "-P", "-m", "splice"]
CMD ["--help"]
