"""Device code, as files that ship with the package: sources here, launched from `ringmpi.devices`."""
