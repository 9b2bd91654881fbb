"""One data-only file per deployment, `<checkpoint>__<arch>__<topology>`; `cpu` serves them all."""
