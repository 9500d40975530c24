//! Traces: what the client says of them reaches the app, and what the proxy adds reaches a collector.

use serde_json::{Value, json};

use crate::support::{App, Bridge, McpClient, TestServer, send, soon, tools};

const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const OTHER: &str = "00-11111111111111111111111111111111-2222222222222222-01";

/// An app that is told of its callers.
async fn telling(server: &TestServer) -> (App, Bridge) {
    let registration = json!({ "device_id": "d", "tools": tools(&["echo"]), "bridge_features": ["context"] });
    let app = App::register_with(server, registration).await;
    let bridge = app.connect().await;
    (app, bridge)
}

/// What an app is told as `meta` when a client calls with this `_meta`, if any; the call succeeds.
async fn meta_of(client: &McpClient, bridge: &mut Bridge, meta: Option<&str>) -> Option<Value> {
    let meta = meta.map_or(String::new(), |meta| format!(r#","_meta":{meta}"#));
    let request = client.request(format!(
        r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"echo","arguments":{{}}{meta}}}}}"#
    ));
    let call = tokio::spawn(send(request));
    let frame = bridge.recv().await;
    bridge.answer(frame["request_id"].as_str().unwrap(), r#""ok":true,"content":"done""#).await;
    let reply = soon(call).await.unwrap();
    assert_eq!((reply.status, reply.tool_text().as_str()), (200, "done"));
    frame.get("meta").cloned()
}

#[tokio::test]
async fn the_trace_of_the_headers_reaches_the_app_where_meta_does_not_tell_it() {
    let server = TestServer::start(&[]).await;
    let (app, mut bridge) = telling(&server).await;
    let client = app.client();
    assert_eq!(meta_of(&client, &mut bridge, None).await, None);
    let client = client.header("traceparent", PARENT).header("tracestate", "a=1").header("tracestate", "b=2");
    let client = client.header("baggage", "user=x");
    let carried = json!({ "traceparent": PARENT, "tracestate": "a=1,b=2", "baggage": "user=x" });
    assert_eq!(meta_of(&client, &mut bridge, None).await, Some(carried.clone()));
    let mut with_more = carried;
    with_more["x"] = json!(1);
    assert_eq!(meta_of(&client, &mut bridge, Some(r#"{"x":1,"progressToken":1}"#)).await, Some(with_more));
    // A trace in _meta wins as a whole; baggage has nothing to do with it.
    let meta = json!({ "traceparent": OTHER });
    let both = json!({ "traceparent": OTHER, "baggage": "user=x" });
    assert_eq!(meta_of(&client, &mut bridge, Some(&meta.to_string())).await, Some(both));
    let meta = json!({ "traceparent": "malformed", "tracestate": 5, "baggage": null });
    assert_eq!(meta_of(&client, &mut bridge, Some(&meta.to_string())).await, Some(meta));
}

#[tokio::test]
async fn malformed_traces_in_headers_are_not_carried_and_harm_no_call() {
    let server = TestServer::start(&[]).await;
    let (app, mut bridge) = telling(&server).await;
    let long = "x".repeat(9000);
    for traceparent in ["", "x", &PARENT.to_uppercase(), &format!("{PARENT}-"), "00-0-0-01", "\u{e9}", &long] {
        let client =
            app.client().header("traceparent", traceparent).header("tracestate", "a=1").header("baggage", &long);
        assert_eq!(meta_of(&client, &mut bridge, None).await, None, "{traceparent}");
    }
    let twice = app.client().header("traceparent", PARENT).header("traceparent", OTHER);
    assert_eq!(meta_of(&twice, &mut bridge, None).await, None);
}

#[tokio::test]
async fn an_app_that_asked_for_nothing_is_told_nothing() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    let client = app.client().header("traceparent", PARENT).header("baggage", "a=1");
    assert_eq!(meta_of(&client, &mut bridge, Some(&json!({ "traceparent": PARENT }).to_string())).await, None);
}
