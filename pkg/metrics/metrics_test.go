// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package metrics

import (
	"io"
	"net"
	"net/http"
	"testing"

	"github.com/cilium/hive"
	"github.com/cilium/hive/cell"
	"github.com/cilium/hive/hivetest"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
)

func TestServe(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := free.Addr().String()
	require.NoError(t, free.Close())

	h := hive.New(Cell, cell.Invoke(func(r prometheus.Registerer) {
		counter := prometheus.NewCounter(prometheus.CounterOpts{Name: "test_total", Help: "Test."})
		r.MustRegister(counter)
		counter.Inc()
	}))
	h.Viper().Set("prometheus-serve-addr", addr)
	log := hivetest.Logger(t)
	require.NoError(t, h.Start(log, t.Context()))
	response, err := http.Get("http://" + addr + "/metrics")
	require.NoError(t, err)
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Contains(t, string(body), "test_total 1")
	require.Contains(t, string(body), "process_resident_memory_bytes")
	require.NoError(t, h.Stop(log, t.Context()))
	_, err = http.Get("http://" + addr + "/metrics")
	require.Error(t, err)
}

func TestAddressTaken(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	h := hive.New(Cell)
	h.Viper().Set("prometheus-serve-addr", taken.Addr().String())
	require.ErrorContains(t, h.Start(hivetest.Logger(t), t.Context()), "--prometheus-serve-addr")
}
