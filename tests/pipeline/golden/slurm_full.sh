#!/bin/bash
#SBATCH --job-name=paceline-0123456789ab-1a2b3c-d4e5f6
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gres=gpu:a100:4
#SBATCH --mem=64G
#SBATCH --time=2-00:00:00
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --qos=high
#SBATCH --constraint=a100&nvlink
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --exclusive
#SBATCH --mail-type=END
module load cuda
ulimit -n 65536
exec srun --ntasks-per-node=1 --cpu-bind=none --mpi=none --kill-on-bad-exit=1 '/opt/my python/bin/python' -E -c BOOTSTRAP < '/home/me/it'"'"'s a $(touch x) run/request'
