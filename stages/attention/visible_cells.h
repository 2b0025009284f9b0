// The cells that a row sees, segment by segment: those whose mask is not minus infinity. Cells are counted among the
// visible ones only, so that neither gaps nor the length of the cache move a segment's borders.
#pragma once

#include "sizes.h"

#include "ggml-cpu-impl.h"
#include "ggml.h"
#include "simd-mappings.h"

#include <algorithm>

namespace {

class VisibleCells {
public:
    VisibleCells() = default;

    // mask: a number for each cell, or null if all are visible.
    VisibleCells(const ggml_fp16_t * mask, int64_t num_cells) : mask_(mask), num_cells_(num_cells) {}

    // Cells and masks of the next segment, the masks padded with zeros to whole lanes; returns how many there are.
    int read_segment(int32_t * cells, float * masks) {
        int count = 0;
        while (count < SEGMENT_CELLS && next_ < num_cells_) {
            if (SEGMENT_CELLS - count >= BLOCK && num_cells_ - next_ >= BLOCK && read_block(cells, masks, &count)) {
                continue;
            }
            cells[count] = (int32_t) next_;
            masks[count] = mask_ ? GGML_CPU_FP16_TO_FP32(mask_[next_]) : 0.0f;
            count += is_visible(next_++);
        }
        std::fill(masks + count, masks + padded(count), 0.0f);
        return count;
    }

    void skip_segments(int64_t segments) {
        int64_t left = segments * SEGMENT_CELLS;
        while (left > 0 && next_ < num_cells_) {
            const int64_t count = std::min({(int64_t) BLOCK, left, num_cells_ - next_});
            left -= mask_ ? count - count_hidden(count) : count;
            next_ += count;
        }
    }

    // How many there are from here on.
    int64_t count() const {
        int64_t visible = num_cells_ - next_;
        for (int64_t cell = next_; mask_ != nullptr && cell < num_cells_; ++cell) {
            visible -= mask_[cell] == HIDDEN;
        }
        return visible;
    }

private:
    static constexpr int BLOCK = 32;
    static constexpr ggml_fp16_t HIDDEN = 0xfc00;  // minus infinity

    bool is_visible(int64_t cell) const { return mask_ == nullptr || mask_[cell] != HIDDEN; }

    int count_hidden(int64_t count) const {
        uint16_t hidden = 0;
        for (int64_t place = 0; place < count; ++place) {
            hidden += mask_[next_ + place] == HIDDEN;
        }
        return hidden;
    }

    // Takes a block of cells if it is simple: all hidden, or all visible with a mask of zero.
    bool read_block(int32_t * cells, float * masks, int * count) {
        if (mask_ != nullptr) {
            uint16_t bits = 0;
            for (int place = 0; place < BLOCK; ++place) {
                bits |= mask_[next_ + place];
            }
            if (bits != 0) {
                const bool all_hidden = count_hidden(BLOCK) == BLOCK;
                next_ += all_hidden ? BLOCK : 0;
                return all_hidden;
            }
        }
        for (int place = 0; place < BLOCK; ++place) {
            cells[*count + place] = (int32_t) next_ + place;
            masks[*count + place] = 0.0f;
        }
        *count += BLOCK;
        next_ += BLOCK;
        return true;
    }

    const ggml_fp16_t * mask_ = nullptr;
    int64_t num_cells_ = 0, next_ = 0;
};

}  // namespace
