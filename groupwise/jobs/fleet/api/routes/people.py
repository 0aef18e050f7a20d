"""Projects, and the keys of the API. Keys are made and revoked with an admin's key that is bound to no project."""

from __future__ import annotations

from functools import partial

from fastapi.responses import Response

from groupwise.api.schemas.fleet import KeyBody, ProjectBody
from groupwise.api.schemas.keys import Role
from groupwise.jobs.fleet.api.serving import DOCUMENTS, Context, changes, document, reads
from groupwise.jobs.fleet.operations import keys, projects
from groupwise.jobs.fleet.operations.projects import UNCHANGED

TAG = "people"


async def list_projects(context: Context) -> Response:
    """The projects that the key may see, with their waiting and running jobs."""
    return document(await context.read(projects.listing))


async def change_project(context: Context, name: str, body: ProjectBody) -> Response:
    """Set weight and quotas; a new project is created."""
    changed_fields = {field: getattr(body, field) for field in body.model_fields_set}
    return document(
        await context.run(
            projects.change,
            name,
            weight=changed_fields.get("weight", UNCHANGED),
            max_gpus=changed_fields.get("max_gpus", UNCHANGED),
            max_waiting=changed_fields.get("max_waiting", UNCHANGED),
        )
    )


async def list_keys(context: Context) -> Response:
    """All keys with their properties, but not their texts."""
    return document(await context.read(keys.listing))


async def make_key(context: Context, body: KeyBody) -> Response:
    """Create a key. This response has its text; no later one does."""
    key = await context.run(
        keys.make, body.role, projects=body.projects, lasts=body.seconds, note=body.note
    )
    return document(key, 201)


async def revoke_key(context: Context, key_id: str) -> Response:
    """Revoke a key from the next request on."""
    return document(await context.run(keys.revoke, key_id))


change = partial(changes, tag=TAG, role=Role.ADMIN)
read = partial(reads, tag=TAG)
ROUTES = (
    read("/projects", list_projects, answer=DOCUMENTS),
    change("/projects/{name}", change_project, method="PUT", takes_body=True),
    read("/keys", list_keys, role=Role.ADMIN, answer=DOCUMENTS),
    change("/keys", make_key, takes_body=True, status=201),
    change("/keys/{key_id}/revoke", revoke_key, "unknown_key"),
)
