"""The command ``regionfed``: one subcommand a file, named in `server_app.cli.main`."""
