# shellcheck shell=bash
# Makes the command titan available. All batch scripts source this file, so edit it for your site:
# load modules, activate another environment, set NCCL_* variables.
export PATH=/folder/of/titan:"$PATH"
