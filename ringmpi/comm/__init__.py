"""Everything that touches MPI: buffers and posted transfers, progress, clocks, launch checks.

Nothing here knows what attention is. No wait for a transfer or for a team blocks inside MPI: each is a loop
of tests, so that signals and time limits act at once. Importing this package imports no MPI library.
"""
