"""Models and what they are asked to do; each is a `client_app.task.Task`."""
