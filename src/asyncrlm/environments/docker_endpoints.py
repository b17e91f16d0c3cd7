"""Where a Docker Engine is to be found, as the `docker` command finds it."""

from __future__ import annotations

import hashlib
import os
import ssl
from pathlib import Path
from typing import Any

import msgspec

from ..caught import described
from ..errors import ConfigurationError


class Endpoint(msgspec.Struct, frozen=True):
    """Where an engine listens, and how that is known."""

    url: str
    source: str
    certificates: str | None = None
    """A folder with `ca.pem`, `cert.pem` and `key.pem`, any of which may be missing."""
    verify: bool = True

    def tls(self) -> ssl.SSLContext:
        """Raises OSError or ssl.SSLError for certificates that can't be read."""
        folder = Path(self.certificates or ".")
        ca, cert, key = (folder / f"{name}.pem" for name in ("ca", "cert", "key"))
        context = ssl.create_default_context(cafile=str(ca) if ca.exists() else None)
        if cert.exists():
            context.load_cert_chain(str(cert), str(key))
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def find_engine(host: str | None = None, context: str | None = None) -> Endpoint:
    """As the `docker` command does, and then where rootless engines and Podman listen. Reads files.

    In this order: `host`, `context`, DOCKER_HOST, DOCKER_CONTEXT, the current context of the command's configuration,
    the usual sockets.

    Raises:
        ConfigurationError: for a context that is not there, or if none of these names an engine.
    """
    environ = os.environ
    if host is None and context is None and environ.get("DOCKER_HOST"):
        host, source = environ["DOCKER_HOST"], "DOCKER_HOST"
    else:
        source = "docker_host"
    if host is not None:
        secured = host.startswith("https:") or bool(environ.get("DOCKER_TLS_VERIFY"))
        folder = environ.get("DOCKER_CERT_PATH") or str(_config_folder())
        return Endpoint(host, source, folder if secured and not host.startswith(("unix:", "ssh:")) else None)
    context = context or environ.get("DOCKER_CONTEXT") or _current_context()
    if context and context != "default":
        return _of_context(context)
    runtime = environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    sockets = [
        "/var/run/docker.sock",
        "/run/docker.sock",
        f"{runtime}/docker.sock",
        f"{Path.home()}/.docker/run/docker.sock",
        f"{runtime}/podman/podman.sock",
        "/run/podman/podman.sock",
    ]
    for path in sockets:
        if Path(path).is_socket():
            return Endpoint(f"unix://{path}", "its usual place")
    raise ConfigurationError(
        "no Docker Engine was found: start one, or name it with DOCKER_HOST, a docker context or docker_host= "
        f"(there is none of {', '.join(sockets)})"
    )


def _config_folder() -> Path:
    return Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")


def _current_context() -> str | None:
    path = _config_folder() / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]).get("currentContext")
    except OSError:
        return None
    except msgspec.DecodeError as e:
        raise ConfigurationError(f"{path} can't be read: {e}") from e


def _of_context(name: str) -> Endpoint:
    digest = hashlib.sha256(name.encode()).hexdigest()
    folder = _config_folder() / "contexts"
    try:
        meta = msgspec.json.decode((folder / "meta" / digest / "meta.json").read_bytes())
        endpoint = meta["Endpoints"]["docker"]
        url = str(endpoint["Host"])
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as e:
        raise ConfigurationError(f"the docker context {name!r} can't be used: {described(e)}") from e
    certificates = folder / "tls" / digest / "docker"
    verify = not endpoint.get("SkipTLSVerify", False)
    secured = certificates.is_dir() or url.startswith("https:")
    return Endpoint(url, f"the docker context {name!r}", str(certificates) if secured else None, verify)
