#!/bin/sh
# Runs once, when the database is made: a role for the dashboard that can only read.
set -eu

psql --no-psqlrc -v ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" \
    -v password="$DASHBOARD_PASSWORD" -v owner="$POSTGRES_USER" -v database="$POSTGRES_DB" <<'SQL'
CREATE ROLE dashboard LOGIN PASSWORD :'password';
ALTER ROLE dashboard SET default_transaction_read_only = on;
GRANT CONNECT ON DATABASE :"database" TO dashboard;
GRANT USAGE ON SCHEMA public TO dashboard;
ALTER DEFAULT PRIVILEGES FOR ROLE :"owner" IN SCHEMA public GRANT SELECT ON TABLES TO dashboard;
SQL
