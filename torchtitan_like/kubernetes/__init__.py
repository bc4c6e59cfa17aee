"""Jobs on Kubernetes and with SkyPilot: the files of a job, and what runs in each of its pods."""
