"""Reading bytes: parallel ``preadv`` with checksums; files that are written so that they survive a crash."""
