#!/bin/sh
# Makes the database at the first start and runs what is in /docker-entrypoint-initdb.d
# while the server listens on its socket only, as the public image does.
set -eu

if [ ! -s "$PGDATA/PG_VERSION" ]; then
    initdb --username="$POSTGRES_USER" --pwfile=/dev/stdin --auth-host=scram-sha-256 \
        --auth-local=trust --encoding=UTF8 <<PASSWORD
$POSTGRES_PASSWORD
PASSWORD
    echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
    pg_ctl -D "$PGDATA" -o "-c listen_addresses=''" -w start
    createdb --username="$POSTGRES_USER" "$POSTGRES_DB"
    for script in /docker-entrypoint-initdb.d/*.sh; do
        sh "$script"
    done
    pg_ctl -D "$PGDATA" -m fast -w stop
fi
exec postgres -D "$PGDATA" -c listen_addresses='*'
