"""A browserless client for the tests of servers; one for all, as making one takes 0.2 s."""

import atexit

import httpx

web = httpx.Client(timeout=60, verify=False)
atexit.register(web.close)
