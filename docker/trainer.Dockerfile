# The trainer, and the orchestrator. Build from the repository root: docker build -f docker/trainer.Dockerfile -t splice-trainer .
# The development image has nvcc and cuDNN's headers, with which TransformerEngine's extension is compiled.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends build-essential python3.12-dev python3.12-venv && \
    rm -rf /var/lib/apt/lists/*
WORKDIR /opt/splice
COPY . .
RUN requirements/make_env.sh python3.12 /opt/env requirements/trainer-cuda.lock 3.12 3.13
# The image's cuDNN was for the compiler. TransformerEngine would load it before the newer one of the lock.
RUN rm -f /usr/lib/*-linux-gnu/libcudnn* && ldconfig
ENV PATH=/opt/env/bin:$PATH LD_LIBRARY_PATH=/opt/env/lib/python3.12/site-packages/nvidia/cudnn/lib:$LD_LIBRARY_PATH HF_HUB_OFFLINE=1
ENTRYPOINT ["python", "-m", "splice"]
CMD ["--help"]
