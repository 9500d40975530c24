//! Who gets in: two tokens, each for its own side.

use serde_json::json;

use crate::support::{App, McpClient, TestServer, http, send};

#[tokio::test]
async fn each_token_opens_its_own_side_only() {
    let server = TestServer::start(&[("APP_TOKEN", "app-token"), ("OPENCLAW_TOKEN", "claw-token")]).await;
    let app = App::register_as(&server, json!({ "device_id": "d" }), "app-token").await;
    for (authorization, is_app, is_client) in [
        (None, false, false),
        (Some("Bearer app-token"), true, false),
        (Some("bearer app-token"), true, false),
        (Some("Bearer claw-token"), false, true),
        (Some("BEARER  claw-token"), false, true),
        (Some("Bearer wrong"), false, false),
        (Some("Bearer app-toke"), false, false),
        (Some("Bearer app-tokenx"), false, false),
        (Some("Bearer "), false, false),
        (Some("app-token"), false, false),
        (Some("Basic app-token"), false, false),
    ] {
        let with = |request: reqwest::RequestBuilder| match authorization {
            Some(value) => request.header("authorization", value),
            None => request,
        };
        let sessions = format!("{}/v1/chat/sessions", server.base);
        let create = send(with(http().post(&sessions).json(&json!({ "device_id": "d" })))).await;
        assert_eq!(create.status, if is_app { 200 } else { 401 }, "{authorization:?}");
        let show = send(with(http().get(app.session_url()))).await;
        assert_eq!(show.status, if is_app { 200 } else { 401 }, "{authorization:?}");
        let foreign = send(with(http().delete(format!("{sessions}/0123456789abcdef0123456789abcdef")))).await;
        assert_eq!(foreign.status, if is_app { 200 } else { 401 }, "{authorization:?}");
        for url in [app.mcp_url.clone(), format!("{}/v1/mcp", server.base)] {
            let request = McpClient::new(&url).request(r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#);
            let ping = send(with(request)).await;
            assert_eq!(ping.status, if is_client { 200 } else { 401 }, "{authorization:?}");
            if !is_client {
                assert_eq!(ping.header("www-authenticate"), Some("Bearer"));
                assert_eq!((&ping.json()["error"]["code"], &ping.json()["id"]), (&json!(401), &json!(1)));
            }
        }
        if !is_app {
            assert_eq!(create.header("www-authenticate"), Some("Bearer"));
            assert!(create.json()["detail"].is_string());
            for refused in [&create, &show] {
                assert!(!refused.text.contains("app-token") && !refused.text.contains("wrong"));
            }
        }
    }
    assert_eq!(send(http().get(format!("{}/health", server.base))).await.status, 200);
}

#[tokio::test]
async fn a_refusal_says_what_is_missing() {
    let server = TestServer::start(&[("OPENCLAW_TOKEN", "claw-token")]).await;
    let client = McpClient::new(&format!("{}/v1/mcp", server.base));
    let message = async |client: McpClient| {
        client.rpc("1", "ping", "{}").await.json()["error"]["message"].as_str().unwrap().to_owned()
    };
    assert!(message(client.clone()).await.contains("missing"));
    assert!(message(client.clone().header("authorization", "Bearer nope")).await.contains("not valid"));
    assert!(
        message(client.header("authorization", "Bearer ${OPENCLAW_PROXY_OPENCLAW_TOKEN}")).await.contains("expand")
    );
}

#[tokio::test]
async fn empty_tokens_on_loopback_let_everybody_in() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let client = app.client().header("authorization", "Bearer whatever");
    assert_eq!(client.rpc("1", "tools/list", "{}").await.status, 200);
    app.connect().await;
}
