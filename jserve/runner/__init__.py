"""The only place where a host plan becomes arrays.  A runner has two methods: `launch(plan)` and `collect()`."""
