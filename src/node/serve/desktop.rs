//! The flags that say what this computer's capabilities are made of.

use std::path::PathBuf;

use clap::Args;

use crate::auth::Token;
use crate::node::Setup;
use crate::node::capabilities::browser::Host;

/// Programs, models and folders. All of them are found by themselves where they can be.
#[derive(Debug, Args)]
#[command(next_help_heading = "Capabilities")]
pub(super) struct DesktopArgs {
    /// The browser for canvas.*: one that is built on Chromium [default: the first that is found]
    #[arg(long, value_name = "PROGRAM", env = "OPENCLAW_NODE_CANVAS_BROWSER")]
    canvas_browser: Option<PathBuf>,
    /// Let the canvas reach this computer and its private network although a bridge is on; without a bridge, it may
    #[arg(long, env = "OPENCLAW_NODE_CANVAS_PRIVATE_NETWORK")]
    canvas_private_network: bool,
    /// Who speaks for tts.speak: piper, espeak, windows or say [default: piper, else what the system has]
    #[arg(long, value_name = "NAME", env = "OPENCLAW_NODE_TTS_PROVIDER")]
    tts_provider: Option<String>,
    /// Piper's program [default: on PATH]
    #[arg(long, value_name = "PROGRAM", env = "OPENCLAW_NODE_PIPER")]
    piper: Option<PathBuf>,
    /// Piper's voice, a file *.onnx with its *.onnx.json beside it
    #[arg(long, value_name = "FILE", env = "OPENCLAW_NODE_PIPER_VOICE")]
    piper_voice: Option<PathBuf>,
    /// Keep everything that is spoken as a WAV file in this folder
    #[arg(long, value_name = "FOLDER", env = "OPENCLAW_NODE_TTS_OUTPUT_DIR")]
    tts_output_dir: Option<PathBuf>,
    /// whisper.cpp's program for stt.* [default: whisper-cli on PATH]
    #[arg(long, value_name = "PROGRAM", env = "OPENCLAW_NODE_WHISPER")]
    whisper: Option<PathBuf>,
    /// whisper.cpp's model, such as ggml-base.bin
    #[arg(long, value_name = "FILE", env = "OPENCLAW_NODE_WHISPER_MODEL")]
    whisper_model: Option<PathBuf>,
    /// The microphone, as the recorder names it [default: the system's default]
    #[arg(long, value_name = "NAME", env = "OPENCLAW_NODE_MICROPHONE")]
    microphone: Option<String>,
    /// The port of a browser-control host on 127.0.0.1 for browser.proxy
    #[arg(long, value_name = "PORT", env = "OPENCLAW_NODE_BROWSER_CONTROL_PORT", value_parser = clap::value_parser!(u16).range(1..))]
    browser_control_port: Option<u16>,
    /// That host's token; better set in the environment, since everybody can see arguments
    #[arg(
        long,
        value_name = "TOKEN",
        env = "OPENCLAW_NODE_BROWSER_CONTROL_TOKEN",
        hide_env_values = true,
        default_value = ""
    )]
    browser_control_token: String,
    /// The folder of files that the host's replies may name; without it, none is read
    #[arg(long, value_name = "FOLDER", env = "OPENCLAW_NODE_BROWSER_CONTROL_FILES")]
    browser_control_files: Option<PathBuf>,
}

impl DesktopArgs {
    /// Puts what is given into a setup.
    pub(super) fn apply(&self, setup: &mut Setup, bridge_is_on: bool) {
        setup.canvas.reaches_private_network = !bridge_is_on || self.canvas_private_network;
        setup.canvas.program = self.canvas_browser.clone();
        setup.tts.provider = self.tts_provider.clone();
        setup.tts.piper = self.piper.clone();
        setup.tts.piper_voice = self.piper_voice.clone();
        setup.tts.output_dir = self.tts_output_dir.clone();
        setup.stt.whisper = self.whisper.clone();
        setup.stt.whisper_model = self.whisper_model.clone();
        setup.stt.microphone = self.microphone.clone();
        setup.browser = self.browser_control_port.map(|port| Host {
            port,
            token: Token::new(self.browser_control_token.clone()),
            files_dir: self.browser_control_files.clone(),
        });
    }
}
