# Stands in for the public Jaeger image: takes OTLP on 4317, answers the health check,
# and tells on 16686 what arrived.
ARG BASE
FROM ${BASE}
USER root
COPY wget /usr/local/bin/wget
COPY jaeger.py /usr/local/bin/jaeger.py
RUN chmod 755 /usr/local/bin/wget
USER 10001
EXPOSE 4317 13133 16686
ENTRYPOINT ["python", "/usr/local/bin/jaeger.py"]
