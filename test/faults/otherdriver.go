// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/test/lab"
)

const (
	// otherDriver is another DRA driver, whose Prepare fails until a file is there. This program is it, with otherFlag.
	otherDriver = "other.networkdriver.test"
	otherFlag   = "other-driver"
	otherReady  = "/run/faults-other-ready"
)

// failing answers kubelet.
type failing struct{}

var _ kubeletplugin.DRAPlugin = failing{}

// PrepareResourceClaims implements [kubeletplugin.DRAPlugin].
func (failing) PrepareResourceClaims(_ context.Context, claims []*resourceapi.ResourceClaim) (map[kubetypes.UID]kubeletplugin.PrepareResult, error) {
	results := map[kubetypes.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		if _, err := os.Stat(otherReady); err != nil {
			results[claim.UID] = kubeletplugin.PrepareResult{Err: errors.New("the other driver fails")}
			continue
		}
		var devices []kubeletplugin.Device
		for _, r := range claim.Status.Allocation.Devices.Results {
			if r.Driver == otherDriver {
				devices = append(devices, kubeletplugin.Device{Requests: []string{r.Request}, PoolName: r.Pool, DeviceName: r.Device})
			}
		}
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: devices}
	}
	return results, nil
}

// UnprepareResourceClaims implements [kubeletplugin.DRAPlugin].
func (failing) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[kubetypes.UID]error, error) {
	results := map[kubetypes.UID]error{}
	for _, claim := range claims {
		results[claim.UID] = nil
	}
	return results, nil
}

// HandleError implements [kubeletplugin.DRAPlugin].
func (failing) HandleError(_ context.Context, err error, msg string) {
	fmt.Fprintln(os.Stderr, msg, err)
}

// WatchHealthStatus implements [kubeletplugin.DRAPlugin].
func (failing) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return kubeletplugin.ErrHealthNotSupported
}

// beOtherDriver is the other driver on a node, until the context ends.
func beOtherDriver(ctx context.Context, node string) error {
	config, err := clientcmd.BuildConfigFromFlags("", lab.AdminKubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	dir := filepath.Join("/var/lib/kubelet/plugins", otherDriver)
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	helper, err := kubeletplugin.Start(ctx, failing{}, kubeletplugin.DriverName(otherDriver), kubeletplugin.NodeName(node),
		kubeletplugin.KubeClient(client), kubeletplugin.PluginDataDirectoryPath(dir))
	if err != nil {
		return err
	}
	defer helper.Stop()
	err = helper.PublishResources(ctx, resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{
		node: {Slices: []resourceslice.Slice{{Devices: []resourceapi.Device{{Name: "device"}}}}},
	}})
	if err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

const otherObjects = `
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: other}
spec: {selectors: [{cel: {expression: 'device.driver == "` + otherDriver + `"'}}]}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: other, namespace: %s}
spec: {spec: {devices: {requests: [{name: other, exactly: {deviceClassName: other}}]}}}
`

// otherFails has another DRA driver fail to prepare its device of a pod that has a VF as well.
func otherFails(long time.Duration) func(context.Context, *bench, int) error {
	return func(ctx context.Context, b *bench, number int) error {
		program, err := os.Executable()
		if err != nil {
			return err
		}
		data, err := os.ReadFile(program)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(b.ShareDir(), otherFlag), data, 0o755); err != nil {
			return err
		}
		if err := b.Apply(ctx, []byte(fmt.Sprintf(otherObjects, b.ns))); err != nil {
			return err
		}
		if err := b.node.Start(ctx, otherFlag, filepath.Join(lab.ShareDir, otherFlag), "--"+otherFlag, b.node.Name()); err != nil {
			return err
		}
		b.pods++
		name := fmt.Sprintf("p%d-vf-plain", b.pods)
		err = b.create(ctx, name, kind{template: "vf", vlan: firstVLAN, shape: "plain", also: "other"})
		if err == nil {
			time.Sleep(long)
			var pod *corev1.Pod
			if pod, err = b.Client.CoreV1().Pods(b.ns).Get(ctx, name, metav1.GetOptions{}); err == nil && pod.Status.Phase != corev1.PodPending {
				err = fmt.Errorf("the pod is %s although another driver's device is not prepared", pod.Status.Phase)
			}
		}
		b.fault()
		if _, runErr := b.node.Run(ctx, "touch "+otherReady); err == nil {
			err = runErr
		}
		if err == nil {
			err = b.running(ctx, name)
		}
		b.recovered()
		err = errors.Join(err, b.delete(ctx, 1, name))
		_, stopErr := b.node.Stop(ctx, otherFlag)
		_, runErr := b.node.Run(ctx, fmt.Sprintf("rm -rf %s /var/lib/kubelet/plugins/%s /var/lib/kubelet/plugins_registry/%s*", otherReady, otherDriver, otherDriver))
		deleteErr := b.Client.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{},
			metav1.ListOptions{FieldSelector: "spec.driver=" + otherDriver})
		return errors.Join(err, stopErr, runErr, deleteErr)
	}
}

// withAlso gives a pod a claim of another template as well.
func withAlso(pod *corev1.Pod, template string) {
	pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, corev1.PodResourceClaim{Name: "also", ResourceClaimTemplateName: ptr.To(template)})
	pod.Spec.Containers[0].Resources.Claims = append(pod.Spec.Containers[0].Resources.Claims, corev1.ResourceClaim{Name: "also"})
}
