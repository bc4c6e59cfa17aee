# shellcheck shell=bash
# Makes the command titan available, and names its Python. All batch scripts source this file, so edit it for your site:
# load modules, activate another environment, set NCCL_* variables.
export PATH=/folder/of/titan:"$PATH"
# shellcheck disable=SC2034 # the batch scripts use it
PYTHON=${PYTHON:-/python/of/titan}
