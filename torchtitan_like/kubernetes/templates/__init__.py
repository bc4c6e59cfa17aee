"""Files that `titan k8s init` copies."""
