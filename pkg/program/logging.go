// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package program

import (
	"fmt"
	"io"
	"log/slog"
)

const (
	formatText = "text"
	formatJSON = "json"
)

func newLogger(w io.Writer, format string, debug bool) (*slog.Logger, error) {
	opts := &slog.HandlerOptions{Level: slog.LevelInfo}
	if debug {
		opts.Level = slog.LevelDebug
	}
	switch format {
	case formatText:
		return slog.New(slog.NewTextHandler(w, opts)), nil
	case formatJSON:
		return slog.New(slog.NewJSONHandler(w, opts)), nil
	}
	return nil, fmt.Errorf("--%s: %q is neither %s nor %s", flagLogFormat, format, formatText, formatJSON)
}
