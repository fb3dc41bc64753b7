"""Privacy that is accounted: mechanisms, the ledger of releases, the accountant, the plan."""
