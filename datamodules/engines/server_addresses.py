"""Where servers are, and how they are trusted."""

import logging
import ssl
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

log = logging.getLogger(__name__)


def check_endpoints(endpoints: Sequence[str]) -> None:
    """Refuse what is no list of addresses, and addresses with a key in them.

    Raises:
        ValueError: with the config key.
    """
    if not endpoints or isinstance(endpoints, str) or len(set(endpoints)) < len(endpoints):
        raise ValueError(f"engine.endpoints must list different addresses, or be null, got {endpoints!r}")
    for url in endpoints:
        parts = urlsplit(url)
        if parts.username or parts.password or parts.query:
            raise ValueError(
                "engine.endpoints must not hold a key, which would end up in logs: put it into the environment "
                "variable that engine.api_key_variable names"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise ValueError(f"engine.endpoints must look like http://node3:8000, got {url!r}")


def trust(verify_tls: bool, tls_certificates: str | None) -> ssl.SSLContext | bool:
    """Return how the certificates of https endpoints are checked: not, against the system's authorities, or a file's.

    Raises:
        ValueError: the file holds no certificates.
    """
    if not verify_tls:
        log.warning("engine.verify_tls=false: anyone between here and the servers may read the key")
        return False
    if tls_certificates is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(Path(tls_certificates).expanduser()))
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"engine.tls_certificates: {tls_certificates} holds no certificates ({error})") from error
