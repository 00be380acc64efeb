"""Reads the kubeconfig: the API server and the credentials.

As in kubectl, $KUBECONFIG may list several files, and the first that defines a name wins. Imported
only where lightkube is installed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final, TypeVar

import yaml
from lightkube import KubeConfig
from lightkube.config.kubeconfig import DEFAULT_KUBECONFIG, SingleConfig
from lightkube.config.models import NameValue, User
from lightkube.core.exceptions import ConfigError
from msgspec.structs import replace

from elasticrun.core.words import did_you_mean
from elasticrun.jobs.backend import RequestFailed

T = TypeVar("T")

LOGIN: Final = "client.authentication.k8s.io/"
"""API group of the protocol for login programs (exec plugins). Its v1 has the same form as its
v1beta1, which lightkube supports."""


def settings(context: str = "") -> SingleConfig:
    """The settings of a context, "" for the current one; in a pod without a kubeconfig, those of
    its service account, with the context name "". Raises RequestFailed."""
    given = os.environ.get("KUBECONFIG") or DEFAULT_KUBECONFIG
    named = [Path(one).expanduser() for one in given.split(os.pathsep) if one]
    paths = [path for path in named if path.exists()]
    if not paths:
        try:
            account = KubeConfig.from_service_account().get()
            assert account is not None
            return account._replace(context_name="")
        except (ConfigError, OSError, LookupError):
            raise RequestFailed(
                f"no cluster is configured here: {given} does not exist; set $KUBECONFIG to "
                "another "
                "kubeconfig"
            ) from None
    files = list(map(_read, paths))
    name = context or next((one.current_context for one in files if one.current_context), "")
    there = [one for file in files for one in file.contexts]
    has = did_you_mean(name, there) or f"; it has {', '.join(there[:8]) or 'none'}"
    if not name:
        raise RequestFailed(
            f"the kubeconfig {given} has no current context: choose one with --context{has}"
        )
    meant = _first(file.contexts.get(name) for file in files)
    if meant is None:
        raise RequestFailed(f"the kubeconfig {given} has no context {name}{has}")
    home = next((file for file in files if meant.cluster in file.clusters), None)
    user = _first(file.users.get(meant.user) for file in files) if meant.user else None
    if home is None or (meant.user and user is None):
        what = f"cluster {meant.cluster}" if home is None else f"user {meant.user}"
        raise RequestFailed(
            f"context {name} of the kubeconfig {given} has a {what} that is not in it"
        )
    found = home.clusters[meant.cluster]
    return SingleConfig(name, meant, found, _with_exec_info(user), home.fname)


def _read(path: Path) -> KubeConfig:
    try:
        return KubeConfig.from_file(path)
    except OSError as wrong:
        raise RequestFailed(f"the kubeconfig {path} cannot be read: {wrong.strerror}") from None
    except (ConfigError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
        raise RequestFailed(
            f"{path} is not a kubeconfig: see `kubectl config view`, or set $KUBECONFIG to "
            "another one"
        ) from None


def _first(found: Iterable[T | None]) -> T | None:
    return next((one for one in found if one is not None), None)


def _with_exec_info(user: User | None) -> User | None:
    """The user, with the variable that kubectl passes to an exec plugin, if the user has one."""
    known = user.exec if user is not None else None
    if user is None or known is None or not known.apiVersion.startswith(LOGIN):
        return user
    asks = {"apiVersion": known.apiVersion, "kind": "ExecCredential"}
    variable = NameValue(
        "KUBERNETES_EXEC_INFO", json.dumps({**asks, "spec": {"interactive": False}})
    )
    env = [*(known.env or ()), variable]
    return replace(user, exec=replace(known, apiVersion=f"{LOGIN}v1beta1", env=env))
