"""`titan k8s`: one module for each verb."""
