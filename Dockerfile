# One image for the server and every party: docker compose up (see compose.yaml).
FROM python:3.11-slim-bookworm

WORKDIR /src
# The CPU build of PyTorch; leave the index out for CUDA.
COPY constraints.txt ./
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu \
    --constraint constraints.txt torch

COPY pyproject.toml README.md LICENSE ./
COPY flower_vfl flower_vfl
COPY strategies strategies
COPY simulations simulations
RUN pip install --no-cache-dir --constraint constraints.txt . trustme \
    && cp -r simulations/label_leakage /app \
    && useradd --create-home --uid 10001 vertical \
    && install -d -o vertical /srv/vertical /srv/vertical/server \
        /srv/vertical/bank /srv/vertical/shop /srv/vertical/telco
COPY docker/prepare.py /usr/local/bin/

USER 10001
WORKDIR /srv/vertical
ENV FLWR_TELEMETRY_ENABLED=0 PYTHONUNBUFFERED=1
CMD ["flower-vfl", "--help"]
