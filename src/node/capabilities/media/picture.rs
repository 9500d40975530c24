//! A picture on its way from a screen or a camera to the caller: made smaller, encoded, and in Base64.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use image::codecs::jpeg::JpegEncoder;
use image::codecs::png::{CompressionType, FilterType, PngEncoder};
use image::{ImageFormat, RgbImage, imageops};
use tokio_util::sync::CancellationToken;

use super::Failure;
use crate::node::capabilities::Image;

/// How a picture is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Without loss.
    Png,
    /// With loss, and small.
    Jpeg,
}

impl Format {
    /// The format of this name.
    pub fn parse(name: &str) -> Option<Self> {
        match &*name.trim().to_ascii_lowercase() {
            "png" => Some(Format::Png),
            "jpeg" | "jpg" => Some(Format::Jpeg),
            _ => None,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Format::Png => "png",
            Format::Jpeg => "jpeg",
        }
    }
}

/// How a caller wants a picture.
#[derive(Debug, Clone, Copy)]
pub struct Wish {
    /// Its format.
    pub format: Format,
    /// A wider one is made smaller.
    pub max_width: u32,
    /// From 1 to 100, if the format has such.
    pub quality: u8,
}

/// A picture that can be handed over.
#[derive(Debug)]
pub struct Picture {
    /// Its width in pixels.
    pub width: u32,
    /// Its height in pixels.
    pub height: u32,
    /// Its format.
    pub format: Format,
    /// Its bytes.
    pub base64: String,
}

impl Picture {
    /// The picture as a URL.
    pub fn data_url(&self) -> String {
        format!("data:image/{};base64,{}", self.format.name(), self.base64)
    }

    /// The picture for clients that can show one.
    pub fn into_image(self) -> Image {
        Image { mime_type: format!("image/{}", self.format.name()), base64: self.base64 }
    }
}

/// Makes a picture as the caller wants it, on a thread where that may take its time.
///
/// # Errors
/// [`Failure`] if nobody wants it any more, or it cannot be encoded.
pub async fn encode(image: RgbImage, wish: Wish, cancel: &CancellationToken) -> Result<Picture, Failure> {
    let work = tokio::task::spawn_blocking(move || encode_now(image, wish));
    match cancel.run_until_cancelled(work).await {
        Some(Ok(encoded)) => encoded.map_err(Failure::other),
        Some(Err(error)) => Err(Failure::other(error)),
        None => Err(Failure::Cancelled),
    }
}

fn encode_now(mut image: RgbImage, wish: Wish) -> image::ImageResult<Picture> {
    let (width, height) = fit(image.dimensions(), wish.max_width);
    if width < image.width() {
        // The mean of the pixels that become one: what is thin pales instead of vanishing.
        image = imageops::thumbnail(&image, width, height);
    }
    let mut bytes = Vec::new();
    match wish.format {
        // A page of text at 1920 x 1080 takes 30 ms and a quarter of what the fastest way makes of it in 10; more
        // effort takes three times as long for a tenth less.
        Format::Png => {
            let encoder = PngEncoder::new_with_quality(&mut bytes, CompressionType::Level(2), FilterType::Adaptive);
            image.write_with_encoder(encoder)
        }
        Format::Jpeg => image.write_with_encoder(JpegEncoder::new_with_quality(&mut bytes, wish.quality)),
    }?;
    Ok(Picture { width, height, format: wish.format, base64: BASE64_STANDARD.encode(bytes) })
}

/// The size of a picture that is at most so wide, with its proportions; the height is rounded down.
fn fit((width, height): (u32, u32), max_width: u32) -> (u32, u32) {
    if width <= max_width {
        return (width, height);
    }
    let height = u64::from(height) * u64::from(max_width) / u64::from(width);
    (max_width, u32::try_from(height).expect("it only becomes smaller").max(1))
}

/// The picture in the bytes of a PNG, on a thread where that may take its time.
///
/// # Errors
/// [`Failure`] if it is none, or too large.
pub async fn decode_png(bytes: Vec<u8>) -> Result<RgbImage, Failure> {
    let work = move || image::load_from_memory_with_format(&bytes, ImageFormat::Png);
    let decoded = tokio::task::spawn_blocking(work).await.map_err(Failure::other)?;
    Ok(decoded.map_err(Failure::other)?.into_rgb8())
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::Rgb;

    #[test]
    fn formats_go_by_their_names() {
        let formats = ["png", " PNG ", "jpg", "Jpeg", "svg", "webp", ""].map(Format::parse);
        assert_eq!(
            formats,
            [Some(Format::Png), Some(Format::Png), Some(Format::Jpeg), Some(Format::Jpeg), None, None, None]
        );
    }

    #[test]
    fn only_what_is_too_wide_becomes_smaller_and_keeps_its_proportions() {
        for (size, max_width, fitted) in [
            ((800, 600), 800, (800, 600)),
            ((801, 600), 800, (800, 599)),
            ((1920, 1080), 1366, (1366, 768)),
            ((7680, 1), 16, (16, 1)),
            ((100, 60_000), 16, (16, 9600)),
            ((10, 20_000), 16, (10, 20_000)),
        ] {
            assert_eq!(fit(size, max_width), fitted);
        }
    }

    #[tokio::test]
    async fn a_picture_survives_being_encoded() {
        let image = RgbImage::from_fn(64, 32, |x, _| if x < 32 { Rgb([250, 10, 20]) } else { Rgb([0, 0, 255]) });
        for (format, max_width, tolerance) in [(Format::Png, 64, 0), (Format::Png, 32, 0), (Format::Jpeg, 64, 12)] {
            let wish = Wish { format, max_width, quality: 90 };
            let picture = encode(image.clone(), wish, &CancellationToken::new()).await.unwrap();
            let bytes = BASE64_STANDARD.decode(&picture.base64).unwrap();
            let decoded = image::load_from_memory(&bytes).unwrap().into_rgb8();
            assert_eq!(decoded.dimensions(), (max_width, max_width / 2));
            assert_eq!((picture.width, picture.height), decoded.dimensions());
            for (x, expected) in [(2, [250, 10, 20]), (max_width - 2, [0, 0, 255])] {
                let pixel = decoded.get_pixel(x, 5).0;
                assert!(pixel.iter().zip(expected).all(|(a, b)| a.abs_diff(b) <= tolerance), "{pixel:?}");
            }
            let start = format!("data:image/{};base64,", format.name());
            assert_eq!(picture.data_url().strip_prefix(&start), Some(&*picture.base64));
        }
        assert!(decode_png(b"no picture".to_vec()).await.is_err());
    }

    #[tokio::test]
    async fn nothing_is_encoded_for_nobody() {
        let (wish, cancel) = (Wish { format: Format::Png, max_width: 16, quality: 1 }, CancellationToken::new());
        cancel.cancel();
        assert!(matches!(encode(RgbImage::new(1, 1), wish, &cancel).await, Err(Failure::Cancelled)));
    }
}
