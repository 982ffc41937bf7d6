# Stands in for the public postgres image: Debian's PostgreSQL behind an entrypoint
# that does what docker-compose.yml relies on.
ARG BASE
FROM ${BASE}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends postgresql \
    && rm -rf /var/lib/apt/lists/* /var/lib/postgresql/*/main \
    && chmod 3777 /run/postgresql \
    && mkdir -p /var/lib/postgresql/data && chown postgres:postgres /var/lib/postgresql/data \
    && ln -s /usr/lib/postgresql/*/bin/* /usr/local/bin/
COPY postgres-entrypoint.sh /usr/local/bin/docker-entrypoint.sh
ENV PGDATA=/var/lib/postgresql/data
VOLUME /var/lib/postgresql/data
STOPSIGNAL SIGINT
EXPOSE 5432
ENTRYPOINT ["sh", "/usr/local/bin/docker-entrypoint.sh"]
