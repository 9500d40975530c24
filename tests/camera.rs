//! The node's cameras, through its local MCP server. No machine need have one: ffmpeg makes up what they see, and
//! reads it as it reads a camera.

use openclaw_mcp_proxy::node::capabilities::Exposure;
use openclaw_mcp_proxy::node::capabilities::camera::devices::Device;
use openclaw_mcp_proxy::node::capabilities::camera::{self, Camera};
use openclaw_mcp_proxy::node::capabilities::media::ffmpeg::Source;
use serde_json::json;

use crate::local_mcp::Local;
use crate::screen::{
    BLUE, RED, WHITE, assert_ends_when_cancelled, assert_near, bytes, duration, failure, payload, picture, probe,
};
use crate::support::McpClient;

/// A local MCP server that lends cameras.
async fn lend_cameras(devices: Vec<Device>) -> (Local, McpClient) {
    let local = Local::start().await;
    local.registry.add(Camera::new(camera::Options { devices: Some(devices) }), Exposure::Everywhere);
    let client = McpClient::new(&local.url);
    (local, client)
}

/// A camera whose picture ffmpeg makes up.
fn made_up(id: &str, picture: &str, sound: Option<&str>) -> Device {
    let audio = sound.map(|sound| Source::new("lavfi", sound));
    Device { id: id.to_owned(), name: format!("Camera {id}"), video: Source::new("lavfi", picture), audio }
}

#[tokio::test]
async fn the_cameras_are_listed_and_the_first_one_is_the_default() {
    let (_local, client) = lend_cameras(Vec::new()).await;
    assert_eq!(payload(&client.call("camera.list", "{}").await), json!({ "cameras": [] }));
    assert_eq!(failure(&client, "camera.snap", "{}").await, "Snap failed: this node has no camera");
    assert_eq!(failure(&client, "camera.clip", "{}").await, "Clip failed: this node has no camera");

    let (red, blue) = (made_up("a", "color=red", None), made_up("b", "color=blue", None));
    let (_local, client) = lend_cameras(vec![red, blue]).await;
    let expected = json!({ "cameras": [{ "deviceId": "a", "name": "Camera a", "isDefault": true },
        { "deviceId": "b", "name": "Camera b", "isDefault": false }] });
    assert_eq!(payload(&client.call("camera.list", r#"{"x":1}"#).await), expected);
    for (args, colour) in [("{}", RED), (r#"{"deviceId":"b"}"#, BLUE), (r#"{"deviceId":7}"#, RED)] {
        let seen = picture(&payload(&client.call("camera.snap", args).await));
        assert_near(&seen, 5, 5, colour, 8);
    }
    for id in ["c", "-version", "/dev/video0", "color=green"] {
        let args = json!({ "deviceId": id }).to_string();
        assert_eq!(failure(&client, "camera.snap", &args).await, "Snap failed: there is no such camera");
        assert_eq!(failure(&client, "camera.clip", &args).await, "Clip failed: there is no such camera");
    }
}

#[tokio::test]
async fn a_photo_is_as_the_caller_wants_it() {
    let (bars, busy) = ("smptebars=size=1600x1200:rate=30", "testsrc2=size=640x480:rate=30");
    let (_local, client) = lend_cameras(vec![made_up("bars", bars, None), made_up("busy", busy, None)]).await;
    let reply = client.call("camera.snap", "{}").await;
    let shown = payload(&reply);
    assert_eq!((picture(&shown).dimensions(), &shown["format"]), ((1280, 960), &json!("jpeg")));
    let item = json!({ "type": "image", "data": shown["base64"], "mimeType": "image/jpeg" });
    assert_eq!(reply.json()["result"]["content"][1], item);
    for (args, size) in [
        (r#"{"maxWidth":99999}"#, (1600, 1200)),
        (r#"{"maxWidth":1}"#, (16, 12)),
        (r#"{"format":"png","maxWidth":333}"#, (333, 249)),
    ] {
        assert_eq!(picture(&payload(&client.call("camera.snap", args).await)).dimensions(), size, "{args}");
    }
    let busy = async |quality: i32| {
        let args = json!({ "deviceId": "busy", "quality": quality }).to_string();
        bytes(&payload(&client.call("camera.snap", &args).await)).len()
    };
    assert!(busy(-3).await * 3 < busy(80).await && busy(80).await < busy(500).await);
    // White is at the lower left.
    assert_near(&picture(&shown), 330, 900, WHITE, 8);
    let says = "Unsupported camera snap format: use jpeg or png";
    assert_eq!(failure(&client, "camera.snap", r#"{"format":"svg"}"#).await, says);
}

#[tokio::test]
async fn a_clip_has_sound_if_there_is_some() {
    let picture = "testsrc=size=322x241:rate=25";
    let devices = [("tone", Some("sine")), ("deaf", Some("no_such_sound")), ("silent", None)];
    let (_local, client) = lend_cameras(devices.map(|(id, sound)| made_up(id, picture, sound)).into()).await;
    for (args, millis, kinds) in [
        (r#"{"durationMs":1500}"#, 1500, &["audio", "video"][..]),
        (r#"{"durationMs":500,"includeAudio":false}"#, 500, &["video"]),
        (r#"{"durationMs":500,"deviceId":"deaf"}"#, 500, &["video"]),
        (r#"{"deviceId":"silent"}"#, 3000, &["video"]),
        (r#"{"durationMs":-1,"deviceId":"silent"}"#, 100, &["video"]),
    ] {
        let clip = payload(&client.call("camera.clip", args).await);
        let facts = json!([clip["format"], clip["durationMs"], clip["hasAudio"]]);
        assert_eq!(facts, json!(["mp4", millis, kinds.len() == 2]), "{args}");
        let probed = probe(&clip, "camera");
        let streams = probed["streams"].as_array().unwrap();
        let mut found: Vec<_> = streams.iter().map(|stream| stream["codec_type"].as_str().unwrap()).collect();
        found.sort_unstable();
        assert_eq!(found, kinds, "{args}");
        assert!((duration(&probed) - f64::from(millis) / 1000.0).abs() < 0.11, "{args}: {probed}");
        let video = streams.iter().find(|stream| stream["codec_type"] == "video").unwrap();
        assert_eq!((&video["width"], &video["height"]), (&json!(322), &json!(240)));
    }
    let says = "Unsupported camera clip format: use mp4";
    assert_eq!(failure(&client, "camera.clip", r#"{"format":"webm"}"#).await, says);
}

#[tokio::test]
async fn a_camera_that_fails_or_is_cancelled_leaves_nothing_behind() {
    let endless = "testsrc=size=64x64,realtime";
    let devices = vec![made_up("broken", "no_such_picture", None), made_up("endless", endless, None)];
    let (_local, client) = lend_cameras(devices).await;
    assert_eq!(failure(&client, "camera.snap", "{}").await, "Snap failed");
    assert_eq!(failure(&client, "camera.clip", "{}").await, "Clip failed");
    let args = r#"{"deviceId":"endless","durationMs":60000}"#;
    assert_ends_when_cancelled(&client, "camera.clip", args, endless).await;
}
