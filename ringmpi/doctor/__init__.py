"""What this machine offers, on one page that a person can paste into a ticket.

Rooms are by what they look at. Each yields facts; a fact that something is missing brings the one command
or module that helps. Under a launcher rank 0 prints the page, and what differs on other ranks.
"""

from ringmpi.doctor.examination import examine

__all__ = ["examine"]
