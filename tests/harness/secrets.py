"""Fake secrets with the names and formats of real environments."""

from __future__ import annotations

import re
import uuid

# Variables that hold secrets in real environments, with the format of their values. S: secret.
SECRET_VARIABLES = {
    "NOTIFY_WEBHOOK": "https://hooks.slack.com/services/T0/B0/S",
    "SLACK_WEBHOOK_URL": "https://hooks.slack.com/services/S",
    "DISCORD_WEBHOOK": "https://discord.com/api/webhooks/1/S",
    "TEAMS_HOOK": "https://x.webhook.office.com/webhookb2/S",
    "WEBHOOK_URL": "https://example.org/S",
    **dict.fromkeys(
        """SMTP_PASS DB_PASS PASS SUDO_PASS SSHPASS RCLONE_CONFIG_PASS SLURM_JWT JWT BEARER HMAC APP_PIN SESSION_ID LICENSE
        ENCRYPTION_SALT NETRC HF_TOKEN HUGGING_FACE_HUB_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN
        AWS_ACCESS_KEY_ID DB_PASSWORD MYSQL_PWD PGPASSWORD SMTP_PASSWORD GITHUB_PAT GH_TOKEN SENTRY_DSN VAULT_TOKEN KUBE_TOKEN
        GOOGLE_API_KEY OPENAI_API_KEY ANTHROPIC_API_KEY NGC_API_KEY COMET_API_KEY SSH_KEY MLFLOW_TRACKING_PASSWORD
        DOCKER_AUTH_CONFIG NPM_CONFIG__AUTH KEY_PASSPHRASE ADMIN_PW COOKIE NOTE TYPED TWINE_PASSWORD
        SNOWFLAKE_PAT GRAFANA_API_KEY ROOT_PW""".split(),
        "S",
    ),
    "AZURE_STORAGE_CONNECTION_STRING": "DefaultEndpointsProtocol=https;AccountKey=S==;EndpointSuffix=x",
    "AZURE_STORAGE_SAS": "sv=2022&sig=S",
    "BLOB_URL": "https://a.blob.example.org/c?sv=1&sig=S",
    "S3_PRESIGNED": "https://b.s3.example.org/k?X-Amz-Signature=S",
    "JDBC_URL": "jdbc:postgresql://h/db?user=me&password=S",
    "ODBC": "Driver=x;Server=h;Uid=me;Pwd=S;",
    "CONNECTION_STRING": "Server=h;User Id=me;password=S;",
    "CURL_OPTS": "-H 'Authorization: Bearer S'",
    "GIT_CONFIG_VALUE_0": "Authorization: Basic S",
    "GIT_CONFIG_PARAMETERS": "'http.extraheader=Authorization: Basic S'",
    "HTTP_PROXY": "me:S@proxy:3128",
    "HTTPS_PROXY": "http://me:S@proxy:3128",
    "DATABASE_URL": "postgres://me:S@S/S@host/db",
    "REDIS_URL": "redis://:S@host/0",
    "PIP_INDEX_URL": "https://me:S@pypi.example.org/simple",
    "GIT_REMOTE": "https://me:S@git.example.org/r.git",
    # Listed names and prefixes with a secret in their value or in their name.
    "HF_ENDPOINT": "https://me:S@hub.example.org",
    "NCCL_AUTH_TOKEN": "S",
    "TORCH_SECRET": "S",
    "CUDA_DB_URL": "postgres://me:S@S/S@host/db",
    "MASTER_ADDR": "me:S@host",
    "PYTHONPATH": "https://me@h/x?token=S",
    "NCCL_NOTE": "password=S",
    "NCCL_HEADER": "Authorization: Basic S",
    "NCCL_HOOK": "https://hooks.example.org/S",
    "NCCL_KNOWN": "hf_0123456789S",
}


def new_secret() -> str:
    """Return a random word that is in no source file.

    uncommitted.diff records changed test files, so a constant secret would appear there.
    """
    return f"s{uuid.uuid4().hex}"


def with_secret(form: str, secret: str) -> str:
    """Replace each S in `form` that is a separate word or follows a known prefix."""
    return re.sub(r"(?<![A-Za-z])S(?![A-Za-z0-9])", secret, form)
