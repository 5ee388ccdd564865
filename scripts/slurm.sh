#!/bin/bash
# A conversion on four machines with eight GPUs each, under Slurm: sbatch scripts/slurm.sh
# The model and the output lie on a file system that all machines share, with locks (flock).
#SBATCH --job-name=hqconv
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
set -eu

SRC=${SRC:-/models/Qwen3-235B-A22B}
OUT=${OUT:-/models/Qwen3-235B-A22B-mxfp4-tp8}

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# --resume: a job that Slurm kills and queues again goes on where it was; in an empty folder it just begins.
srun torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-endpoint "$head:29400" --rdzv-id "$SLURM_JOB_ID" \
    -m hqconv convert "$SRC" -o "$OUT" --schema mxfp4 --target sm90 --tp 8 --max-memory 16GiB --resume
