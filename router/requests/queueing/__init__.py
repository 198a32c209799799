"""Requests that wait for capacity, fairly between tenants, and the limits of each tenant."""
