"""Everything that touches MPI: buffers and posted transfers, progress, clocks, launch checks.

Nothing here knows what a block means. No wait blocks inside MPI: each is a loop of tests, so that
signals and time limits act at once. Importing this package imports no MPI library.
"""
