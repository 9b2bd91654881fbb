"""One data-only file per deployment, named `<checkpoint>__<arch>__<topology>`; `cpu` serves any checkpoint."""
