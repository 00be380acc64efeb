"""The script's own version of a package that is installed as well."""

WHERE = "vendored"
