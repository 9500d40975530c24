"""A collector for the tests: takes spans by OTLP over HTTP, reads them with the official messages, and tells of each
request in a line of JSON. Its first line is its port. otlp.py [how many spans of each request it refuses]"""
import base64, json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest as Request,
    ExportTraceServiceResponse as Response,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

REFUSED = int(sys.argv[1]) if len(sys.argv) > 1 else 0

def attributes(pairs):
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}

def told(span):
    return {
        "trace": span.trace_id.hex(), "span": span.span_id.hex(), "parent": span.parent_span_id.hex(),
        "state": span.trace_state, "name": span.name, "kind": Span.SpanKind.Name(span.kind),
        "start": span.start_time_unix_nano, "end": span.end_time_unix_nano, "flags": span.flags,
        "attributes": attributes(span.attributes), "links": [[link.trace_id.hex(), link.span_id.hex()] for link in span.links],
        "is_error": span.status.code == span.status.STATUS_CODE_ERROR,
    }

class Collector(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = Request.FromString(body)
        known = Request.FromString(body)
        known.DiscardUnknownFields()
        [of_resource] = request.resource_spans
        [of_scope] = of_resource.scope_spans
        print(json.dumps({
            "path": self.path, "headers": {name.lower(): value for name, value in self.headers.items()},
            "is_known": known.ByteSize() == len(body), "resource": attributes(of_resource.resource.attributes),
            "scope": [of_scope.scope.name, of_scope.scope.version], "spans": [told(span) for span in of_scope.spans],
            "body": base64.b64encode(body).decode(),
        }), flush=True)
        answer = Response()
        if REFUSED:
            answer.partial_success.rejected_spans = REFUSED
        answer = answer.SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
print(server.server_port, flush=True)
server.serve_forever()
