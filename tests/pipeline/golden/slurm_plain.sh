#!/bin/bash
#SBATCH --job-name=paceline-0123456789ab-1a2b3c-d4e5f6
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --gpus-per-node=4
#SBATCH --requeue
#SBATCH --open-mode=append
exec srun --ntasks-per-node=1 --cpu-bind=none --mpi=none --kill-on-bad-exit=1 '/opt/my python/bin/python' -E -c BOOTSTRAP < '/home/me/it'"'"'s a $(touch x) run/request'
