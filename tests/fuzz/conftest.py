from tests.http.conftest import service

__all__ = ["service"]
